// Attention over latents for 64 queries at a time. Its tiles need the shared memory of a Hopper.
ATTEND_LATENTS(64, 4, 2)
