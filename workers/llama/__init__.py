"""llama.cpp, thin and typed: the only importer of `llama_cpp` and the owner of every pointer."""
