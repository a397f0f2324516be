//! Names of gRPC status codes in texts and metrics of the kubelet.

use tonic::Code;

/// Returns the name of a code as grpc-go prints it (`codes.Code.String`).
#[must_use]
pub fn go_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "Canceled",
        Code::Unknown => "Unknown",
        Code::InvalidArgument => "InvalidArgument",
        Code::DeadlineExceeded => "DeadlineExceeded",
        Code::NotFound => "NotFound",
        Code::AlreadyExists => "AlreadyExists",
        Code::PermissionDenied => "PermissionDenied",
        Code::ResourceExhausted => "ResourceExhausted",
        Code::FailedPrecondition => "FailedPrecondition",
        Code::Aborted => "Aborted",
        Code::OutOfRange => "OutOfRange",
        Code::Unimplemented => "Unimplemented",
        Code::Internal => "Internal",
        Code::Unavailable => "Unavailable",
        Code::DataLoss => "DataLoss",
        Code::Unauthenticated => "Unauthenticated",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_two_codes_have_another_name_than_here() {
        let other = (0..=16).map(Code::from).filter(|code| format!("{code:?}") != go_name(*code));
        assert_eq!(other.map(go_name).collect::<Vec<_>>(), ["OK", "Canceled"]);
    }
}
