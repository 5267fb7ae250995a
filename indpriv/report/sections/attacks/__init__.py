"""The sections on attacks. Sensitive."""
