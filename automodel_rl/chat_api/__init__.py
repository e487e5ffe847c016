"""Public chat APIs: parsing of requests and formatting of answers, independent of any model."""
