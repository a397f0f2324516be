//! `/debug/pprof/`: profiles of this process, with the paths and answers of Go (`pkg/kubelet/server:
//! InstallProfilingHandler`, `net/http/pprof`). What only the Go runtime has is an unknown profile.

use http::{HeaderValue, StatusCode, header};
use node_api_access::User;
use node_api_base::answer::{Answer, text, with_type};
use quintlet_kit::{error_chain, profile};
use quintlet_profile::cpu::{DEFAULT_HERTZ, ProfileError, Sampling};

/// Prefix of the paths.
const BASE: &str = "/debug/pprof";

/// Duration of a profile for which none or no valid one is asked for, in seconds.
const DEFAULT_SECONDS: u32 = 30;

/// Profiles with their descriptions, for the index.
const PROFILES: [(&str, &str); 4] = [
    ("cmdline", "The command line of the process"),
    ("heap", "The allocations that are in use, in the format of jemalloc, if the allocator records them"),
    ("profile", "CPU profile. The duration in seconds is the parameter seconds, from 1 to 60"),
    ("symbol", "The names of addresses. The process knows none: look them up by the build ID of the profile"),
];

/// Returns whether this module answers a path.
pub(crate) fn is_for(path: &str) -> bool {
    path.strip_prefix(BASE).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Answers a GET request.
pub(crate) async fn page(path: &str, query: &[(String, String)], user: Option<&User>) -> Answer {
    let user = user.map(|user| user.name.as_str()).unwrap_or_default();
    match path.strip_prefix(BASE).unwrap_or_default().trim_start_matches('/') {
        "" => with_type(StatusCode::OK, "text/html; charset=utf-8", index()),
        "cmdline" => no_sniff(text(StatusCode::OK, command_line())),
        "profile" => match cpu(query).await {
            Ok(profile) => {
                tracing::info!(target: "audit", user, "CPU profile taken");
                download("profile", profile)
            }
            Err(error) => refused(&error),
        },
        "heap" => match profile::heap().await {
            Ok(profile) => {
                tracing::info!(target: "audit", user, "heap profile taken");
                download("heap", profile)
            }
            Err(error) => refused(&error),
        },
        "symbol" => no_sniff(text(StatusCode::OK, "num_symbols: 0\n")),
        _ => failed(StatusCode::NOT_FOUND, "Unknown profile"),
    }
}

async fn cpu(query: &[(String, String)]) -> Result<Vec<u8>, ProfileError> {
    profile::start(Sampling::new(seconds(query), DEFAULT_HERTZ)?).await?.finish().await
}

/// Returns the duration that a query asks for. As in Go, one that is no positive number is the default.
fn seconds(query: &[(String, String)]) -> u32 {
    let given =
        query.iter().find(|(name, _)| name == "seconds").and_then(|(_, text)| text.parse::<i64>().ok());
    match given {
        Some(seconds) if seconds > 0 => u32::try_from(seconds).unwrap_or(u32::MAX),
        Some(_) | None => DEFAULT_SECONDS,
    }
}

fn refused(error: &ProfileError) -> Answer {
    match error {
        ProfileError::OutOfBounds { .. } => failed(StatusCode::BAD_REQUEST, &error.to_string()),
        ProfileError::NoHeapProfile(_) => failed(StatusCode::NOT_FOUND, &error.to_string()),
        ProfileError::Busy | ProfileError::File { .. } | ProfileError::Profiler { .. } => failed(
            StatusCode::INTERNAL_SERVER_ERROR,
            &format!("Could not enable CPU profiling: {}", error_chain(error)),
        ),
    }
}

/// Returns an error as Go does (`net/http/pprof: serveError`).
fn failed(code: StatusCode, message: &str) -> Answer {
    let mut answer = no_sniff(text(code, format!("{message}\n")));
    answer.headers_mut().insert("x-go-pprof", HeaderValue::from_static("1"));
    answer
}

fn download(name: &'static str, body: Vec<u8>) -> Answer {
    let mut answer = no_sniff(with_type(StatusCode::OK, "application/octet-stream", body));
    if let Ok(value) = HeaderValue::from_str(&format!("attachment; filename=\"{name}\"")) {
        answer.headers_mut().insert(header::CONTENT_DISPOSITION, value);
    }
    answer
}

fn no_sniff(mut answer: Answer) -> Answer {
    answer.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    answer
}

fn command_line() -> String {
    let words: Vec<String> = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    words.join("\0")
}

fn index() -> String {
    let rows: Vec<String> = PROFILES
        .iter()
        .map(|(name, description)| format!("<li><a href='{name}'>{name}</a>: {description}</li>\n"))
        .collect();
    format!(
        "<html>\n<head>\n<title>/debug/pprof/</title>\n</head>\n<body>\n<h1>/debug/pprof/</h1>\n<p>Profiles of node-api; \
         those of the other services are taken by quintctl profile.</p>\n<ul>\n{}</ul>\n</body>\n</html>\n",
        rows.concat()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_that_is_no_positive_number_is_the_default_and_a_large_one_is_kept() {
        for (given, want) in [
            ("1", 1),
            ("60", 60),
            ("61", 61),
            ("0", 30),
            ("-5", 30),
            ("", 30),
            ("x", 30),
            ("99999999999", u32::MAX),
        ] {
            assert_eq!(seconds(&[("seconds".to_owned(), given.to_owned())]), want, "{given:?}");
        }
        assert_eq!(seconds(&[("debug".to_owned(), "1".to_owned())]), 30);
    }

    #[test]
    fn only_paths_below_the_prefix_are_for_this_module() {
        for (path, want) in [
            ("/debug/pprof", true),
            ("/debug/pprof/", true),
            ("/debug/pprof/profile", true),
            ("/debug/pprofx", false),
            ("/debug/flags/v", false),
        ] {
            assert_eq!(is_for(path), want, "{path}");
        }
    }
}
