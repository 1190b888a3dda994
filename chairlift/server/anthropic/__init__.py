"""Endpoints of Anthropic's Messages API."""
