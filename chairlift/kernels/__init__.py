"""Operations on tensors: one name, several implementations, one truth. Import what you need from :mod:`.ops`."""
