"""The closed loop: live session trees, and what they send when."""
