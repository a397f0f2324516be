//! Tests of the configuration: files, flags, and the table of fields.

mod cli;
mod files;
mod migration;
mod properties;
mod secrets;
mod table;
