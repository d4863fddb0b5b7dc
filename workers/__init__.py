"""The worker side of Paddock: worker processes that wrap llama.cpp, and the supervisor that keeps them running."""
