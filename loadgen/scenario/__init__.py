"""What a person chooses: the rules of a scenario, the profiles, the workload."""
