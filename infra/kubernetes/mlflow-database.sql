-- Run once by the Postgres image, when its data folder is empty: beside POSTGRES_DB, which is Prefect's.
CREATE DATABASE mlflow;
