//! Which of the four outcomes a call had: by code, by the kind of failure, and in one place by text.
use quintlet_model::outcome::Outcome;
use tonic::Code;

/// The outcome of a call the runtime answered.
///
/// Codes that a connection, a proxy or a cancelled context make as well are unknown: the work may have been done.
#[must_use]
pub fn of_status(method: &str, code: Code, message: &str) -> Outcome {
    match code {
        Code::Ok => Outcome::Ok,
        Code::Cancelled | Code::DeadlineExceeded | Code::Unavailable => Outcome::Unknown,
        Code::Unknown | Code::AlreadyExists if name_is_reserved(method, message) => Outcome::Unknown,
        Code::Unknown
        | Code::InvalidArgument
        | Code::NotFound
        | Code::AlreadyExists
        | Code::PermissionDenied
        | Code::ResourceExhausted
        | Code::FailedPrecondition
        | Code::Aborted
        | Code::OutOfRange
        | Code::Unimplemented
        | Code::Internal
        | Code::DataLoss
        | Code::Unauthenticated => Outcome::RuntimeError,
    }
}

/// Whether the runtime says that an earlier call for the same name is still under way.
///
/// The one place that reads text: neither containerd nor CRI-O has a code for it. containerd says
/// `failed to reserve sandbox name "…": name "…" is reserved for "…"` (code Unknown); CRI-O says
/// `… name is reserved` while it still creates the first. Only calls that reserve a name can get it.
#[must_use]
pub fn name_is_reserved(method: &str, message: &str) -> bool {
    matches!(method, "RunPodSandbox" | "CreateContainer")
        && (message.contains("is reserved for") || message.contains("name is reserved"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_follow_codes() {
        let reserved = r#"failed to reserve sandbox name "web_default_1_0": name "web_default_1_0" is reserved for "abc""#;
        let cases = [
            ("RunPodSandbox", Code::Ok, "", Outcome::Ok),
            ("RunPodSandbox", Code::Unknown, "cni plugin not initialized", Outcome::RuntimeError),
            ("RunPodSandbox", Code::Unknown, reserved, Outcome::Unknown),
            ("CreateContainer", Code::Unknown, reserved, Outcome::Unknown),
            ("CreateContainer", Code::AlreadyExists, "the container name is reserved", Outcome::Unknown),
            ("StartContainer", Code::Unknown, reserved, Outcome::RuntimeError),
            ("StopContainer", Code::DeadlineExceeded, "", Outcome::Unknown),
            ("StopContainer", Code::Cancelled, "", Outcome::Unknown),
            ("PullImage", Code::Unavailable, "", Outcome::Unknown),
            ("PullImage", Code::NotFound, "", Outcome::RuntimeError),
            ("ContainerStatus", Code::NotFound, "", Outcome::RuntimeError),
            ("StreamImages", Code::Unimplemented, "", Outcome::RuntimeError),
        ];
        for (method, code, message, expected) in cases {
            assert_eq!(of_status(method, code, message), expected, "{method} {code:?} {message}");
        }
    }
}
