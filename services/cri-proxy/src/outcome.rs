//! Classification of replies into the four outcomes, by code and in one case by text.
use quintlet_model::outcome::Outcome;
use tonic::Code;

/// Returns the outcome of a call that the runtime answered.
///
/// Codes that a connection, a proxy or a cancelled context may also produce are unknown: the runtime may have
/// executed the call.
#[must_use]
pub(crate) fn from_status(method: &str, code: Code, message: &str) -> Outcome {
    match code {
        Code::Ok => Outcome::Ok,
        Code::Cancelled | Code::DeadlineExceeded | Code::Unavailable => Outcome::Unknown,
        Code::Unknown | Code::AlreadyExists | Code::FailedPrecondition if is_in_flight(method, message) => {
            Outcome::Unknown
        }
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

/// Returns whether the runtime reports that an earlier call for the same object is still in progress.
///
/// This is the only place that depends on texts, since neither containerd nor CRI-O has a code for it.
/// containerd reports `failed to reserve sandbox name "…": name "…" is reserved for "…"` (code Unknown, in
/// 2.1 FailedPrecondition), and for containers `… container is already in starting state` or
/// `… in removing state`. CRI-O reports `… name is reserved` while it creates the first.
#[must_use]
pub(crate) fn is_in_flight(method: &str, message: &str) -> bool {
    match method {
        "RunPodSandbox" | "CreateContainer" => {
            message.contains("is reserved for") || message.contains("name is reserved")
        }
        "StartContainer" | "StopContainer" | "RemoveContainer" => {
            message.contains("in starting state") || message.contains("in removing state")
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_outcome_follows_from_code_and_text() {
        let reserved = r#"failed to reserve sandbox name "web_default_1_0": name "web_default_1_0" is reserved for "abc""#;
        let starting =
            r#"failed to set starting state for container "c1": container is already in starting state"#;
        let cases = [
            ("RunPodSandbox", Code::Ok, "", Outcome::Ok),
            ("RunPodSandbox", Code::Unknown, "cni plugin not initialized", Outcome::RuntimeError),
            ("RunPodSandbox", Code::Unknown, reserved, Outcome::Unknown),
            ("RunPodSandbox", Code::FailedPrecondition, reserved, Outcome::Unknown),
            ("RunPodSandbox", Code::FailedPrecondition, "no such handler", Outcome::RuntimeError),
            ("CreateContainer", Code::Unknown, reserved, Outcome::Unknown),
            ("CreateContainer", Code::AlreadyExists, "the container name is reserved", Outcome::Unknown),
            ("StartContainer", Code::Unknown, reserved, Outcome::RuntimeError),
            ("StartContainer", Code::Unknown, starting, Outcome::Unknown),
            ("CreateContainer", Code::Unknown, starting, Outcome::RuntimeError),
            ("StopContainer", Code::DeadlineExceeded, "", Outcome::Unknown),
            ("StopContainer", Code::Cancelled, "", Outcome::Unknown),
            ("PullImage", Code::Unavailable, "", Outcome::Unknown),
            ("PullImage", Code::NotFound, "", Outcome::RuntimeError),
            ("ContainerStatus", Code::NotFound, "", Outcome::RuntimeError),
            ("StreamImages", Code::Unimplemented, "", Outcome::RuntimeError),
        ];
        for (method, code, message, expected) in cases {
            assert_eq!(from_status(method, code, message), expected, "{method} {code:?} {message}");
        }
    }
}
