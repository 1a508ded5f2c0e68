// Attention over latents for 64 queries at a time. Its tiles need the shared memory of a Hopper.
ATTEND_LATENTS(attend_latents_64, bf16, 4, 2)
ATTEND_LATENTS(attend_latents_fp8_64, f8, 4, 2)
