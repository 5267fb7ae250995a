"""Language models: text as rows of characters, and GPT-2."""
