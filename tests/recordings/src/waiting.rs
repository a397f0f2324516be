//! Waits of the recording tools.

use std::time::Duration;

use anyhow::bail;
use quintlet_kit::clock::Clock;

/// Longest start or removal of a pod.
const LONG: Duration = Duration::from_secs(120);

/// Interval between checks.
const STEP: Duration = Duration::from_millis(200);

/// Waits until `look` returns a value.
///
/// # Errors
/// Fails if `look` fails, or after two minutes.
pub async fn until<T>(
    what: &str,
    mut look: impl AsyncFnMut() -> anyhow::Result<Result<T, String>>,
) -> anyhow::Result<T> {
    let clock = Clock::system();
    let end = clock.boot() + LONG;
    loop {
        match look().await? {
            Ok(found) => return Ok(found),
            Err(missing) if clock.boot() > end => bail!("{what}: {missing}"),
            Err(_) => tokio::time::sleep(STEP).await,
        }
    }
}
