//! Evaluates what a driver returns. Plain functions.

use std::collections::BTreeSet;

use pod_sync_plugins::call::CallError;

use crate::claim::ClaimKey;
use crate::driver::CallResults;
use crate::error::{ClaimError, DriverMethod};
use crate::inventory::{ClaimCall, PreparedDevice};

/// Longest name of a CDI device, of a pool, a device or a request, in bytes. The checkpoint and each
/// container have them.
const LONGEST_NAME: usize = 1024;
/// Largest number of devices of one driver in a claim. An allocation has at most 32 results.
const MOST_DEVICES: usize = 1024;
/// Longest text of a driver in an event, in bytes.
const LONGEST_TEXT: usize = 4096;

/// The results of a call.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct DriverResults {
    /// Claims for which the driver succeeded, with their devices.
    pub(crate) done: Vec<(ClaimKey, Vec<PreparedDevice>)>,
    /// Claims for which the driver failed, or which are missing in its response.
    pub(crate) failed: BTreeSet<ClaimKey>,
    /// The first error.
    pub(crate) error: Option<ClaimError>,
}

/// Compares the response of a driver with the claims of the request.
pub(crate) fn evaluate(
    method: DriverMethod,
    claims: &[ClaimCall],
    answer: Result<CallResults, CallError>,
) -> DriverResults {
    let mut answers = match answer {
        Ok(answers) => answers,
        Err(error) => return failed(claims, ClaimError::Call { method, error: shortened(error) }),
    };
    let mut results = DriverResults::default();
    let mut skipped = 0_usize;
    for ClaimCall { key, uid } in claims {
        let error = match answers.remove(uid) {
            Some(Ok(devices)) => match unusable(&devices) {
                None => {
                    results.done.push((key.clone(), devices));
                    continue;
                }
                Some(reason) => ClaimError::Unusable { name: key.name.clone(), reason },
            },
            Some(Err(error)) => {
                ClaimError::Failed { method, name: key.name.clone(), error: cut(error, LONGEST_TEXT) }
            }
            None => {
                skipped = skipped.saturating_add(1);
                results.failed.insert(key.clone());
                continue;
            }
        };
        results.failed.insert(key.clone());
        results.error.get_or_insert(error);
    }
    if let Some((uid, _)) = answers.pop_first() {
        let uid = cut(uid, LONGEST_NAME);
        results.error.get_or_insert(ClaimError::UnknownClaim { method, uid });
    }
    if skipped > 0 {
        results.error.get_or_insert(ClaimError::Skipped { method, count: skipped });
    }
    results
}

/// Returns the results of a call that was not made.
pub(crate) fn failed(claims: &[ClaimCall], error: ClaimError) -> DriverResults {
    let failed = claims.iter().map(|claim| claim.key.clone()).collect();
    DriverResults { done: Vec::new(), failed, error: Some(error) }
}

/// Returns why a container could not get these devices.
fn unusable(devices: &[PreparedDevice]) -> Option<String> {
    if devices.len() > MOST_DEVICES {
        return Some(format!("{} devices", devices.len()));
    }
    devices.iter().find_map(|device| {
        let names = [("pool", &device.pool), ("device", &device.device)].into_iter();
        let names = names.chain(device.requests.iter().map(|name| ("request", name)));
        let names = names.chain(device.cdi.iter().map(|name| ("CDI device", name)));
        let mut names = names.chain(device.share.iter().map(|name| ("share", name)));
        if device.cdi.len() > MOST_DEVICES || device.requests.len() > MOST_DEVICES {
            return Some("too many names of a device".to_owned());
        }
        names.find_map(|(kind, name)| {
            if name.len() > LONGEST_NAME {
                Some(format!("name of a {kind} with {} bytes", name.len()))
            } else if name.contains(char::is_control) {
                Some(format!("name of a {kind} with a control character"))
            } else if name.is_empty() && kind == "CDI device" {
                Some("empty name of a CDI device".to_owned())
            } else {
                None
            }
        })
    })
}

fn shortened(error: CallError) -> CallError {
    CallError { code: error.code, message: cut(error.message, LONGEST_TEXT) }
}

fn cut(mut text: String, longest: usize) -> String {
    text.truncate(text.floor_char_boundary(longest));
    text
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    fn calls(names: &str) -> Vec<ClaimCall> {
        let call = |name: &str| ClaimCall {
            key: ClaimKey { namespace: "ns".to_owned(), name: name.to_owned() },
            uid: format!("uid-{name}"),
        };
        names.split_whitespace().map(call).collect()
    }

    fn device(cdi: &str) -> PreparedDevice {
        PreparedDevice { device: "d".to_owned(), cdi: vec![cdi.to_owned()], ..PreparedDevice::default() }
    }

    fn names<'a>(keys: impl IntoIterator<Item = &'a ClaimKey>) -> String {
        keys.into_iter().map(|key| key.name.as_str()).collect::<Vec<_>>().join(" ")
    }

    // Claims, answer by UID, claims that are done, claims that failed, error.
    fn check(
        requested: &str,
        answer: &[(&str, Result<Vec<PreparedDevice>, String>)],
        done: &str,
        failed: &str,
        error: &str,
    ) {
        let answer = answer.iter().map(|(uid, result)| ((*uid).to_owned(), result.clone())).collect();
        let results = evaluate(DriverMethod::Prepare, &calls(requested), Ok(answer));
        assert_eq!(names(results.done.iter().map(|(key, _)| key)), done);
        assert_eq!(names(&results.failed), failed);
        assert_eq!(results.error.map(|error| error.to_string()).unwrap_or_default(), error);
    }

    #[test]
    fn each_claim_of_the_request_needs_a_result() {
        let ok = || Ok(vec![device("a.com/d=1")]);
        let err = || Err("on fire".to_owned());
        check("a b", &[("uid-a", ok()), ("uid-b", Ok(Vec::new()))], "a b", "", "");
        check("a b", &[("uid-a", ok())], "a", "b", "NodePrepareResources skipped 1 ResourceClaims");
        check("a b", &[], "", "a b", "NodePrepareResources skipped 2 ResourceClaims");
        let text = "NodePrepareResources failed for ResourceClaim a: on fire";
        check("a b", &[("uid-a", err()), ("uid-b", ok())], "b", "a", text);
        check("a b", &[("uid-a", err())], "", "a b", text);
        let text = "NodePrepareResources returned result for unknown claim UID uid-x";
        check("a", &[("uid-a", ok()), ("uid-x", ok())], "a", "", text);
    }

    #[test]
    fn devices_that_no_container_can_get_are_refused() {
        let text = |reason: &str| {
            format!("NodePrepareResources returned an unusable device for ResourceClaim a: {reason}")
        };
        let huge = "x".repeat(1 << 20);
        let table = [
            (device(&huge), "name of a CDI device with 1048576 bytes"),
            (device(""), "empty name of a CDI device"),
            (device("a.com/d=1\n"), "name of a CDI device with a control character"),
            (PreparedDevice { pool: huge.clone(), ..device("c") }, "name of a pool with 1048576 bytes"),
            (
                PreparedDevice { requests: vec![huge.clone()], ..device("c") },
                "name of a request with 1048576 bytes",
            ),
            (PreparedDevice { cdi: vec!["c".to_owned(); 1025], ..device("c") }, "too many names of a device"),
        ];
        for (device, reason) in table {
            check("a", &[("uid-a", Ok(vec![device]))], "", "a", &text(reason));
        }
        check("a", &[("uid-a", Ok(vec![device("c"); 1025]))], "", "a", &text("1025 devices"));
    }

    #[test]
    fn an_error_of_the_call_is_one_of_all_claims_and_its_text_is_bounded() {
        let error = CallError { code: Code::Internal, message: "x".repeat(1 << 20) };
        let results = evaluate(DriverMethod::Unprepare, &calls("a b"), Err(error));
        assert_eq!(names(&results.failed), "a b");
        let text = results.error.unwrap().to_string();
        assert!(text.starts_with("NodeUnprepareResources: rpc error: code = Internal desc = xxx"), "{text}");
        assert!(text.len() < 4200);
    }
}
