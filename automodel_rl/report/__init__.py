"""The report: pages that show one run or several, while they run and afterwards."""
