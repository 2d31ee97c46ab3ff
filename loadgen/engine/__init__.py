"""The simulated attention tier as an inference engine: OpenAI-compatible requests in, MoE steps out."""
