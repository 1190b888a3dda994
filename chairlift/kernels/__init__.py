"""Operations on tensors. Each has one name, one definition, and an implementation per backend. Import from
:mod:`.ops`."""
