"""Numbers below the words: how functions are compiled, how element types become float32."""
