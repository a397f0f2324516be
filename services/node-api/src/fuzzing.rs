//! Entry points of `tests/fuzz` to private functions.

use node_api_base::uri;

use crate::log_query;
pub use crate::log_query::Journal;

/// Parses a log query. Returns the query of the journal, or none if it is no query or one for a file.
///
/// # Errors
/// Returns the reason why the query is refused.
pub fn log_query(form: &str) -> Result<Option<Journal>, String> {
    log_query::journal_of(&uri::decode_form(form)).map_err(|e| e.to_string())
}
