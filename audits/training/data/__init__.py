"""How indpriv/demo/adult.parquet was made of UCI's files (CC BY 4.0)."""
