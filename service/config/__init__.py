"""Everything that a person chooses about a service; nothing else in this product reads the environment."""

from service.config.children import child_environment, inherited_environment, threads_per_rank
from service.config.profiles import PROFILES
from service.config.settings import MIB, ServiceConfig
from service.config.sources import ENV_PREFIX, default_text, load_config, parse_text

__all__ = [
    "ENV_PREFIX",
    "MIB",
    "PROFILES",
    "ServiceConfig",
    "child_environment",
    "default_text",
    "inherited_environment",
    "load_config",
    "parse_text",
    "threads_per_rank",
]
