//! Derives the outcome of a call from its status code and, in one function, from its message.

use quintlet_model::outcome::Outcome;
use tonic::Code;

/// Returns the outcome of a call to which the runtime responded.
///
/// It is unknown for status codes that a connection, a proxy or a cancelled context also produce: the call may have had its effect.
#[must_use]
pub fn of_status(method: &str, code: Code, message: &str) -> Outcome {
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

/// Returns whether the runtime rejects a call because an earlier call for the same name or container is in progress.
///
/// This is the only function that depends on a message, since neither containerd nor CRI-O has a status code for it. For a name, containerd says
/// `failed to reserve sandbox name "…": name "…" is reserved for "…"` (code Unknown, in 2.1 FailedPrecondition); CRI-O says
/// `… name is reserved` while it still creates the first. For a container, containerd says
/// `… container is already in starting state`, and `… in removing state`.
#[must_use]
pub fn is_in_flight(method: &str, message: &str) -> bool {
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
    fn outcomes_follow_codes() {
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
            assert_eq!(of_status(method, code, message), expected, "{method} {code:?} {message}");
        }
    }
}
