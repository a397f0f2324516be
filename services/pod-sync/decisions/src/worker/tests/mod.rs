//! Random histories against the table, and wrong judgements that they must catch.

mod history;
mod invariants;
mod mutants;
mod tables;
