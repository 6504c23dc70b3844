"""From a case to what every rank will do; impossible cases end here. No torch."""
