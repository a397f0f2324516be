//! `PUT /debug/flags/v`: sets the verbosity of the log lines of this process
//! (`apiserver/pkg/server/routes: StringFlagPutHandler`, `component-base/logs: GlogSetter`). It lasts until
//! the process ends, as a filter that `quintctl log-level` sets.

use http::{HeaderValue, StatusCode, header};
use node_api_access::User;
use node_api_base::answer::{Answer, with_type};
use quintlet_telemetry::log_filter;

/// The path of the flag.
pub(crate) const VERBOSITY_PATH: &str = "/debug/flags/v";

/// A text is not a verbosity. The messages are those of Go.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
enum VerbosityError {
    #[error("strconv.ParseUint: parsing {0:?}: invalid syntax")]
    Syntax(String),
    #[error("strconv.ParseUint: parsing {0:?}: value out of range")]
    Range(String),
    #[error("failed set klog.logging.verbosity {0}: strconv.ParseInt: parsing {0:?}: value out of range")]
    TooLarge(String),
}

/// Sets the verbosity that `body` has, for `user`.
pub(crate) fn set_verbosity(body: &[u8], user: &User) -> Answer {
    let text = String::from_utf8_lossy(body);
    let verbosity = match verbosity(&text) {
        Ok(verbosity) => verbosity,
        Err(error) => return plain(StatusCode::BAD_REQUEST, error.to_string()),
    };
    let filter = quintlet_config::verbosity_filter(verbosity);
    match log_filter::replace(filter, true) {
        Ok(change) => {
            tracing::info!(target: "audit", user = user.name, filter, change.previous, "log filter changed");
            plain(StatusCode::OK, format!("successfully set klog.logging.verbosity to {text}"))
        }
        Err(error) => plain(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    }
}

/// Returns the response to another method.
pub(crate) fn unsupported_method() -> Answer {
    plain(StatusCode::NOT_ACCEPTABLE, "unsupported http method".to_owned())
}

fn verbosity(text: &str) -> Result<i64, VerbosityError> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(VerbosityError::Syntax(text.to_owned()));
    }
    let number: u32 = text.parse().map_err(|_| VerbosityError::Range(text.to_owned()))?;
    if i32::try_from(number).is_err() {
        return Err(VerbosityError::TooLarge(text.to_owned()));
    }
    Ok(i64::from(number))
}

fn plain(code: StatusCode, body: String) -> Answer {
    let mut answer = with_type(code, "text/plain", body);
    answer.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verbosity_is_a_number_and_other_texts_have_the_error_of_go() {
        for (text, want) in [
            ("0", Ok(0)),
            ("4", Ok(4)),
            ("007", Ok(7)),
            ("2147483647", Ok(2_147_483_647)),
            ("", Err("strconv.ParseUint: parsing \"\": invalid syntax")),
            ("-1", Err("strconv.ParseUint: parsing \"-1\": invalid syntax")),
            ("+1", Err("strconv.ParseUint: parsing \"+1\": invalid syntax")),
            ("4\n", Err("strconv.ParseUint: parsing \"4\\n\": invalid syntax")),
            ("4294967296", Err("strconv.ParseUint: parsing \"4294967296\": value out of range")),
            (
                "2147483648",
                Err(
                    "failed set klog.logging.verbosity 2147483648: strconv.ParseInt: parsing \"2147483648\": value out of range",
                ),
            ),
        ] {
            let got = verbosity(text).map_err(|error| error.to_string());
            assert_eq!(got, want.map_err(str::to_owned), "{text:?}");
        }
    }
}
