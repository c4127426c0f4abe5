"""Regeneration: what every row of the mix is asked, who answers it, what an answer is worth, what stands in for it."""
