"""What clients ask of the prefix cache: breakpoints, their leases and the numbers in responses, and sessions."""
