"""Define the problems of AMD and GPU MODE's Inference Sprint, and judge the plugin or a submission on them."""
