//! Requests for streams to a pod: exec, attach, port-forward.

use node_api_base::uri::segments_after_first;

/// The kind of a stream request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Runs a new process in a container.
    Exec,
    /// Attaches to the main process of a container.
    Attach,
    /// Connects to a port of a pod.
    PortForward,
}

/// The streams of an exec or attach request (`pkg/kubelet/... remotecommand.Options`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Streams {
    pub(crate) stdin: bool,
    pub(crate) stdout: bool,
    pub(crate) stderr: bool,
    pub(crate) tty: bool,
}

impl Streams {
    pub(crate) const NONE: Self = Self { stdin: false, stdout: false, stderr: false, tty: false };
}

impl Streams {
    pub(crate) fn parse(query: &[(String, String)]) -> Option<Self> {
        let flag = |name: &str| query.iter().any(|(k, v)| k == name && v == "1");
        let tty = flag("tty");
        let streams =
            Self { stdin: flag("input"), stdout: flag("output"), stderr: flag("error") && !tty, tty };
        (streams.stdin || streams.stdout || streams.stderr).then_some(streams)
    }
}

/// The pod and container that a path names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) namespace: String,
    pub(crate) pod: String,
    pub(crate) uid: Option<String>,
    pub(crate) container: String,
}

impl Target {
    /// Parses `{namespace}/{pod}[/{uid}][/{container}]`.
    pub(crate) fn parse(path: &str, has_container: bool) -> Option<Self> {
        let parts = segments_after_first(path);
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        let (namespace, pod, uid, container) = match (parts.as_slice(), has_container) {
            ([ns, pod, container], true) => (ns, pod, None, *container),
            ([ns, pod, uid, container], true) => (ns, pod, Some(*uid), *container),
            ([ns, pod], false) => (ns, pod, None, ""),
            ([ns, pod, uid], false) => (ns, pod, Some(*uid), ""),
            _ => return None,
        };
        let there = |s: &str| !s.is_empty();
        if !there(namespace) || !there(pod) || (has_container && !there(container)) || uid == Some("") {
            return None;
        }
        Some(Self {
            namespace: (*namespace).to_owned(),
            pod: (*pod).to_owned(),
            uid: uid.map(str::to_owned),
            container: container.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_requested_by_the_value_1_and_a_terminal_has_no_stderr() {
        let parse = |q: &str| Streams::parse(&node_api_base::uri::decode_form(q));
        let streams = |stdin, stdout, stderr, tty| Some(Streams { stdin, stdout, stderr, tty });
        assert_eq!(parse("input=1&output=1&error=1&tty=1"), streams(true, true, false, true));
        assert_eq!(parse("output=1&error=1&input=true"), streams(false, true, true, false));
        assert_eq!(parse("error=1&tty=1"), None);
        assert_eq!(parse("stdin=1"), None);
    }

    #[test]
    fn a_path_names_a_pod_and_container_and_optionally_the_uid() {
        let target = |uid: Option<&str>, container: &str| Target {
            namespace: "ns".into(),
            pod: "p".into(),
            uid: uid.map(str::to_owned),
            container: container.into(),
        };
        assert_eq!(Target::parse("/exec/ns/p/c", true), Some(target(None, "c")));
        assert_eq!(Target::parse("/exec/ns/p/u/c", true), Some(target(Some("u"), "c")));
        assert_eq!(Target::parse("/portForward/ns/p", false), Some(target(None, "")));
        assert_eq!(Target::parse("/portForward/ns/p/u", false), Some(target(Some("u"), "")));
        for bad in ["/exec/ns/p", "/exec/ns/p/c/", "/exec//p/c", "/exec/ns/p/u/c/x", "/exec"] {
            assert_eq!(Target::parse(bad, true), None, "{bad}");
        }
    }
}
