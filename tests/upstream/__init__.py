"""llama.cpp's own tests of its server, run unchanged against Paddock."""
