//! Labels that a kubelet may set on its own node (`cmd/kubelet/app/options: ValidateKubeletFlags`,
//! `k8s.io/kubelet/pkg/apis: IsKubeletLabel`).

/// Longest name and longest value in bytes.
const NAME_MAX: usize = 63;
/// Longest prefix in bytes.
const PREFIX_MAX: usize = 253;

/// Labels below `kubernetes.io` that a node may set on itself, besides those with the two prefixes reserved
/// for the kubelet.
const KNOWN: [&str; 11] = [
    "kubernetes.io/hostname",
    "kubernetes.io/os",
    "kubernetes.io/arch",
    "beta.kubernetes.io/os",
    "beta.kubernetes.io/arch",
    "node.kubernetes.io/instance-type",
    "beta.kubernetes.io/instance-type",
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
];

/// Returns the reason why a node may not set a label on itself, if any. The API server would reject the whole
/// Node object.
#[must_use]
pub(crate) fn problem(key: &str, value: &str) -> Option<&'static str> {
    let (prefix, name) = key.rsplit_once('/').map_or((None, key), |(prefix, name)| (Some(prefix), name));
    if name.is_empty() || !is_word(name) || prefix.is_some_and(|prefix| !is_domain(prefix)) {
        return Some("no key of a label: must be NAME or DOMAIN/NAME, of letters, digits, - _ and .");
    }
    if !is_word(value) {
        return Some("no value of a label: must be at most 63 letters, digits, - _ and .");
    }
    let domain = prefix.unwrap_or_default();
    let is =
        |root: &str| domain.strip_suffix(root).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
    let own = is("kubelet.kubernetes.io") || is("node.kubernetes.io");
    if (is("kubernetes.io") || is("k8s.io")) && !own && !KNOWN.contains(&key) {
        return Some(
            "a node may not give itself a label of kubernetes.io or k8s.io but under kubelet.kubernetes.io/ and \
             node.kubernetes.io/",
        );
    }
    None
}

/// Returns whether a text is a valid name or value: empty, or with a letter or digit at both ends.
fn is_word(text: &str) -> bool {
    let at_end = |c: Option<char>| c.is_none_or(|c| c.is_ascii_alphanumeric());
    text.len() <= NAME_MAX
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
        && at_end(text.chars().next())
        && at_end(text.chars().last())
}

fn is_domain(text: &str) -> bool {
    let is_part = |part: &str| {
        !part.is_empty()
            && is_word(part)
            && part.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
    };
    text.len() <= PREFIX_MAX && text.split('.').all(is_part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_sets_only_labels_that_the_api_server_accepts_from_it() {
        let long = "x".repeat(64);
        for (key, value, want) in [
            ("tier", "edge", true),
            ("tier", "", true),
            ("example.com/Tier_1.a", "A-1.b_2", true),
            ("kubernetes.io/hostname", "n", true),
            ("topology.kubernetes.io/zone", "z", true),
            ("node.kubernetes.io/x", "y", true),
            ("pool.node.kubernetes.io/x", "y", true),
            ("kubelet.kubernetes.io/x", "y", true),
            ("notkubernetes.io/x", "y", true),
            ("kubernetes.io/x", "y", false),
            ("node-role.kubernetes.io/worker", "", false),
            ("k8s.io/x", "y", false),
            ("a.k8s.io/x", "y", false),
            ("", "y", false),
            ("-a", "y", false),
            ("a/b/c", "y", false),
            ("/a", "y", false),
            ("Example.com/a", "y", false),
            ("a..b/c", "y", false),
            (&long, "y", false),
            ("a", &long, false),
            ("a", "b c", false),
            ("a", ".b", false),
        ] {
            assert_eq!(problem(key, value).is_none(), want, "{key}={value}: {:?}", problem(key, value));
        }
    }
}
