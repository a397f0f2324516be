//! `/healthz`: one word, or one line per check.

use std::fmt::Write as _;

use http::{HeaderValue, StatusCode, header};

use node_api_base::answer::{Answer, not_found, text};
use node_api_base::services::Services;

/// Names of the checks. `syncloop` is the sync loop of pod-sync.
pub(crate) const CHECKS: [&str; 3] = ["ping", "log", "syncloop"];

/// Responds to `/healthz` and the paths below it.
pub(crate) async fn healthz(node: &Services, path: &str, query: &[(String, String)]) -> Answer {
    let below = path.trim_start_matches("/healthz").trim_matches('/');
    let names: Vec<&str> = match CHECKS.iter().find(|name| **name == below) {
        Some(name) => vec![name],
        None if below.is_empty() => CHECKS.to_vec(),
        None => return not_found(),
    };
    let excluded = |name: &str| query.iter().any(|(k, v)| k == "exclude" && v == name);
    let mut lines = String::new();
    let mut well = true;
    for name in names {
        // Writing to a String does not fail.
        if excluded(name) {
            let _ = writeln!(lines, "[+]{name} excluded: ok");
        } else if check(node, name).await {
            let _ = writeln!(lines, "[+]{name} ok");
        } else {
            well = false;
            let _ = writeln!(lines, "[-]{name} failed: reason withheld");
        }
    }
    let is_verbose = query.iter().any(|(k, _)| k == "verbose");
    let mut answer = match (well, is_verbose) {
        (true, false) => text(StatusCode::OK, "ok"),
        (true, true) => text(StatusCode::OK, format!("{lines}healthz check passed\n")),
        (false, _) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{lines}healthz check failed\n")),
    };
    answer.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    answer
}

/// Returns whether a check passes.
pub(crate) async fn check(node: &Services, name: &str) -> bool {
    match name {
        "syncloop" => node.podsync_serves("syncloop").await,
        // This process responds, so it is healthy.
        _ => true,
    }
}
