//! Entry points of `tests/fuzz` to private functions.

use tokio::io::{AsyncRead, AsyncWrite};

pub use crate::log_query::{Journal, QueryError};

use crate::remote_command::Streams;
use crate::{log_query, uri, websocket};

/// Serves a WebSocket client of `v5.channel.k8s.io` with all streams: error, stdin, stdout, stderr, resize.
pub async fn channels<C, R>(client: C, runtime: R)
where
    C: AsyncRead + AsyncWrite + Unpin + Send,
    R: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let all = Streams { stdin: true, stdout: true, stderr: true, tty: true };
    websocket::channels(client, runtime, all).await;
}

/// Parses a log query. Returns the query of the journal, or none if it is no query or one for a file.
///
/// # Errors
/// Returns the reason why the query is refused.
pub fn log_query(form: &str) -> Result<Option<Journal>, QueryError> {
    log_query::journal_of(&uri::decode_form(form))
}
