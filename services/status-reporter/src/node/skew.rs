//! Compares the version of the API server with those that the node works with.

use std::time::Duration;

use serde_json::Value;
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::api::{ApiClient, ApiFailure};
use crate::status::text;

/// Minor versions of an API server that the node works with.
const SUPPORTED: std::ops::RangeInclusive<u32> = 36..=39;

/// Interval between attempts to read the version.
const RETRY: Duration = Duration::from_secs(30);

/// How the version of an API server compares with the supported ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum VersionSkew {
    /// The minor version is one of [`SUPPORTED`].
    Supported,
    /// Some groups are not served in the versions that the node reads.
    Older,
    /// Versions that the node reads may no longer be served.
    Newer,
}

/// Compares the answer of `/version`. Returns `None` if it has no version.
fn compare(version: &Value) -> Option<VersionSkew> {
    let number = |field| {
        // A distribution may add a suffix, as in `37+`.
        let digits: String = text(version, field).chars().take_while(char::is_ascii_digit).collect();
        digits.parse::<u32>().ok()
    };
    let (major, minor) = (number("major")?, number("minor")?);
    Some(match major {
        1 if SUPPORTED.contains(&minor) => VersionSkew::Supported,
        1 if minor > *SUPPORTED.end() => VersionSkew::Newer,
        0 | 1 => VersionSkew::Older,
        _ => VersionSkew::Newer,
    })
}

/// Logs once if the version of the API server is not supported. Returns when the version is read, or cannot
/// be read.
pub async fn run(api: ApiClient, stop: CancellationToken) {
    // The check is repeated by the next process.
    tokio::select! {
        () = check(&api) => {}
        () = stop.cancelled() => {}
    }
}

async fn check(api: &ApiClient) {
    let version = loop {
        match api.get("/version").await {
            Ok(version) => break version,
            // The path may be closed to nodes.
            Err(ApiFailure::NotFound(_) | ApiFailure::Denied(_)) => return,
            Err(_) => tokio::time::sleep(RETRY).await,
        }
    };
    report(&version);
}

fn report(version: &Value) {
    let server = text(version, "gitVersion");
    match compare(version) {
        Some(VersionSkew::Supported) | None => {}
        Some(VersionSkew::Older) => {
            info!(server, supported = "1.36 to 1.39", "API server is older than this node supports");
        }
        Some(VersionSkew::Newer) => {
            info!(server, supported = "1.36 to 1.39", "API server is newer than this node is tested with");
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_api_server_that_is_not_supported_is_a_line_at_info() {
        for (minor, want) in [("35", Some("is older")), ("36", None), ("40", Some("is newer"))] {
            let lines = quintlet_testkit::logs::Lines::default();
            let log = quintlet_testkit::logs::capture("status-reporter", tracing::Level::TRACE, &lines);
            tracing::dispatcher::with_default(&log, || report(&json!({"major": "1", "minor": minor})));
            let lines = lines.all();
            assert_eq!(lines.len(), usize::from(want.is_some()), "{minor}: {lines:?}");
            for (line, want) in lines.iter().zip(want) {
                let line: Value = serde_json::from_str(line).unwrap();
                assert_eq!(line["level"].as_str().unwrap().to_lowercase(), "info", "{line}");
                assert!(line.to_string().contains(want), "{line}");
            }
        }
    }

    #[test]
    fn versions_from_1_36_to_1_39_are_supported() {
        for (major, minor, want) in [
            ("1", "36", Some(VersionSkew::Supported)),
            ("1", "37+", Some(VersionSkew::Supported)),
            ("1", "39", Some(VersionSkew::Supported)),
            ("1", "35", Some(VersionSkew::Older)),
            ("1", "9", Some(VersionSkew::Older)),
            ("1", "40", Some(VersionSkew::Newer)),
            ("2", "0", Some(VersionSkew::Newer)),
            ("1", "", None),
            ("", "37", None),
            ("one", "37", None),
        ] {
            assert_eq!(compare(&json!({"major": major, "minor": minor})), want, "{major}.{minor}");
        }
        assert_eq!(compare(&json!({"gitVersion": "v1.37.0"})), None);
        assert_eq!(format!("1.{} to 1.{}", SUPPORTED.start(), SUPPORTED.end()), "1.36 to 1.39");
    }
}
