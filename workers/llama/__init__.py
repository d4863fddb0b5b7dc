"""A thin, typed layer over llama.cpp: the only importer of `llama_cpp` and the owner of every pointer."""
