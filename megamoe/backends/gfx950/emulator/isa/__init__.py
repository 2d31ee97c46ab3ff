"""The gfx950 instruction set as tables, and the decoder and disassembler that read them."""
