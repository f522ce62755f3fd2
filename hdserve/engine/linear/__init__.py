"""Linear layers for few rows: which kernel multiplies which of them.

:func:`~hdserve.engine.linear.choice.kernel_for` chooses, layer by layer:

=====================================  ==================================  ========================
where, dtype                           layer                               kernel
=====================================  ==================================  ========================
GPU                                    any                                 ``GPU``
CPU with AMX, bfloat16, not exact      any                                 ``OWN``
CPU with AVX-512 BF16, bfloat16        64 outputs or more, inputs a        ``PREPACKED``
                                       multiple of 32, weights of its own
                                       or of an embedding that only reads
CPU with AVX2 alone, both dtypes       32 outputs or more, inputs a        ``PREPACKED``
                                       multiple of 16, in float32 of 8,
                                       weights as above
other CPUs, and the other layers of    outputs a multiple of 4, inputs     ``SKINNY``
those above, both dtypes               of the lanes of a vector: 16 or 8
all else (float64, odd sizes,          any                                 ``OWN``
quantised weights)
=====================================  ==================================  ========================

``PREPACKED`` multiplies any number of rows.  ``SKINNY`` does so if forwards are exact; else up to
the number at which a trial finds PyTorch faster, and a single float32 row of small layers is
PyTorch's, by weights that are stored by column.  Compiled models call the kernels from C++, then
also for that row (:func:`~hdserve.engine.linear.layers.set_native`).
"""
