"""Reports: plans as text and pictures, comparisons of fused with unfused, and the effects of quantizing on each tensor."""
