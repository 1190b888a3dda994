"""Operations on tensors. Each has one name, one definition, and one implementation per backend. Import them from
:mod:`.ops`."""
