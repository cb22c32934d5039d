"""What work costs on each instance, learned from answers, and what a choice costs everybody. Pure: clocks are given."""
