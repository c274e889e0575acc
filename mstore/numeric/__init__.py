"""Numeric foundations: compiling functions, and converting element types to float32."""
