"""OpenAI's dialect: chats, completions, embeddings, reranking, and lists of models."""
