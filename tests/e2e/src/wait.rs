//! Waiting for a predicate, never for a delay.

use std::fmt::Debug;
use std::time::Duration;

use tokio::time::Instant;

/// Between two looks: more of them would take the processor from those that are waited for.
const STEP: Duration = Duration::from_millis(20);

/// For what takes as long as the machine needs: generous, since it only bounds a failure.
pub const LONG: Duration = Duration::from_secs(60);

/// Looks until `look` gives a value, at most for `limit`.
///
/// # Panics
/// The limit passed; the message names `what` and the last thing seen.
pub async fn until<T, S: Debug>(
    what: &str,
    limit: Duration,
    mut look: impl AsyncFnMut() -> Result<T, S>,
) -> T {
    let deadline = Instant::now() + limit;
    loop {
        match look().await {
            Ok(value) => return value,
            Err(seen) if Instant::now() >= deadline => {
                panic!("waited {limit:?} for {what}; last seen: {seen:#?}")
            }
            Err(_) => tokio::time::sleep(STEP).await,
        }
    }
}
