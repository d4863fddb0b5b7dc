"""Makes drafts: guesses at an answer's next tokens, which one step verifies together (docs/engine.md, Speculation)."""
