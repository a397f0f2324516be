//! Waiting for a predicate with a deadline, never for a delay.

use std::fmt::Debug;
use std::time::Duration;

/// How often [`until`] looks again.
const STEP: Duration = Duration::from_millis(5);

/// Looks with `look` until it gives a value, at most for `limit`.
///
/// # Panics
/// The limit passed; the message names `what` and the last thing seen.
pub async fn until<T, S: Debug>(
    what: &str,
    limit: Duration,
    mut look: impl AsyncFnMut() -> Result<T, S>,
) -> T {
    let deadline = tokio::time::Instant::now() + limit;
    loop {
        match look().await {
            Ok(value) => return value,
            Err(seen) if tokio::time::Instant::now() >= deadline => {
                panic!("waited {limit:?} for {what}; last seen: {seen:#?}")
            }
            Err(_) => tokio::time::sleep(STEP).await,
        }
    }
}
