//! Parses image names (`github.com/distribution/reference`).

/// Longest repository including its registry, in bytes.
const LONGEST: usize = 255;
/// Registry of names without one.
pub const DEFAULT_DOMAIN: &str = "docker.io";
/// Name that docker writes for the default registry.
pub const LEGACY_DEFAULT_DOMAIN: &str = "index.docker.io";
const INVALID: &str = "invalid reference format";

/// An image name cannot be parsed. The text is the kubelet's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("couldn't parse image name {image:?}: {reason}")]
pub struct InvalidImageName {
    image: String,
    reason: InvalidReference,
}

/// The rule that an image name breaks (`github.com/distribution/reference`,
/// `github.com/opencontainers/go-digest`).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidReference {
    /// The text does not have the form of a reference.
    #[error("{}", INVALID)]
    Format,
    /// The repository has capital letters, and would be valid without them.
    #[error("{}: repository name ({}) must be lowercase", INVALID, .0)]
    Uppercase(String),
    /// The name looks like the ID of an image.
    #[error("invalid repository name ({0}), cannot specify 64-byte hexadecimal strings")]
    Hexadecimal(String),
    /// The repository is longer than a registry accepts.
    #[error("repository name must not be more than {} characters", LONGEST)]
    TooLong,
    /// The algorithm of the digest is not registered.
    #[error("unsupported digest algorithm")]
    DigestAlgorithm,
    /// The digest has not the length of its algorithm.
    #[error("invalid checksum digest length")]
    DigestLength,
    /// The digest has characters that are not hexadecimal, or no separator.
    #[error("invalid checksum digest format")]
    DigestFormat,
}

/// Returns the image name with a tag, as sent to the runtime.
///
/// # Errors
/// It is not a valid image name.
pub fn with_tag(image: &str) -> Result<String, InvalidImageName> {
    match parse(image) {
        Ok(true) => Ok(image.to_owned()),
        Ok(false) => Ok(format!("{image}:latest")),
        Err(reason) => Err(InvalidImageName { image: image.to_owned(), reason }),
    }
}

/// Returns the repository of an image, with its registry and without tag and digest:
/// `docker.io/library/busybox`.
#[must_use]
pub fn repository(image: &str) -> String {
    let named = image.split_once('@').map_or(image, |(name, _)| name);
    let last = named.rsplit('/').next().unwrap_or(named);
    let tag = last.find(':').and_then(|at| last.get(at..)).unwrap_or_default();
    let named = named.strip_suffix(tag).unwrap_or(named);
    let (host, rest) = match named.split_once('/') {
        Some((host, rest)) if host.contains(['.', ':']) || host == "localhost" => (host, rest),
        Some(_) | None => (DEFAULT_DOMAIN, named),
    };
    let host = if host == LEGACY_DEFAULT_DOMAIN { DEFAULT_DOMAIN } else { host };
    if host == DEFAULT_DOMAIN && !rest.contains('/') {
        format!("{host}/library/{rest}")
    } else {
        format!("{host}/{rest}")
    }
}

/// Returns the full name of an image, with registry and tag or digest, as the runtime lists it.
#[must_use]
pub fn full_name(image: &str) -> String {
    let repository = repository(image);
    let last = image.rsplit('/').next().unwrap_or_default();
    match (image.split_once('@'), last.split_once(':')) {
        (Some((_, digest)), _) => format!("{repository}@{digest}"),
        (None, Some((_, tag))) => format!("{repository}:{tag}"),
        (None, None) => format!("{repository}:latest"),
    }
}

/// Returns host and port of a repository's registry.
#[must_use]
pub fn registry(repository: &str) -> &str {
    repository.split_once('/').map_or(repository, |(host, _)| host)
}

/// Returns whether the name has a tag or a digest.
fn parse(image: &str) -> Result<bool, InvalidReference> {
    if image.len() == 64 && image.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
        return Err(InvalidReference::Hexadecimal(image.to_owned()));
    }
    let (domain, rest) = split_domain(image);
    let name = rest.split_once(':').map_or(rest.as_str(), |(name, _)| name);
    if name.chars().any(char::is_uppercase) {
        return Err(InvalidReference::Uppercase(name.to_owned()));
    }
    let (rest, digest) = match rest.split_once('@') {
        Some((rest, digest)) => (rest, Some(digest)),
        None => (rest.as_str(), None),
    };
    let (path, tag) = match rest.split_once(':') {
        Some((path, tag)) => (path, Some(tag)),
        None => (rest, None),
    };
    let well_formed = is_domain(&domain)
        && path.split('/').all(is_component)
        && tag.is_none_or(is_tag)
        && digest.is_none_or(is_digest);
    if !well_formed {
        return Err(InvalidReference::Format);
    }
    if domain.len().saturating_add(1).saturating_add(path.len()) > LONGEST {
        return Err(InvalidReference::TooLong);
    }
    if let Some(digest) = digest {
        check_digest(digest)?;
    }
    Ok(tag.is_some() || digest.is_some())
}

// A registry is distinguished from a path component only by its form.
fn split_domain(image: &str) -> (String, String) {
    let official = |rest: &str| {
        let library = if rest.contains('/') { "" } else { "library/" };
        (DEFAULT_DOMAIN.to_owned(), format!("{library}{rest}"))
    };
    match image.split_once('/') {
        Some(("docker.io" | "index.docker.io", rest)) => official(rest),
        Some((domain, rest))
            if domain == "localhost"
                || domain.contains(['.', ':'])
                || domain.chars().any(char::is_uppercase) =>
        {
            (domain.to_owned(), rest.to_owned())
        }
        Some(_) | None => official(image),
    }
}

fn is_domain(domain: &str) -> bool {
    let (host, port) = match domain.strip_prefix('[') {
        Some(rest) => match rest.split_once(']') {
            Some((address, port)) => {
                let ok = !address.is_empty() && address.bytes().all(|b| b.is_ascii_hexdigit() || b == b':');
                (ok, port.strip_prefix(':').or((!port.is_empty()).then_some("")))
            }
            None => (false, None),
        },
        None => {
            let (host, port) = domain.split_once(':').map_or((domain, None), |(h, p)| (h, Some(p)));
            (host.split('.').all(is_label), port)
        }
    };
    host && port.is_none_or(|p| !p.is_empty() && p.bytes().all(|b| b.is_ascii_digit()))
}

fn is_label(label: &str) -> bool {
    !label.is_empty()
        && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
        && !label.starts_with('-')
        && !label.ends_with('-')
}

// Lowercase letters and digits, separated by a dot, one or two underscores, or dashes.
fn is_component(component: &str) -> bool {
    let is_word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let mut between = component.split(is_word).collect::<Vec<_>>();
    let ends_well = component.starts_with(is_word) && component.ends_with(is_word);
    between.retain(|s| !s.is_empty());
    ends_well && between.iter().all(|s| matches!(*s, "." | "_" | "__") || s.bytes().all(|b| b == b'-'))
}

fn is_tag(tag: &str) -> bool {
    let is_word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    tag.len() <= 128
        && tag.bytes().next().is_some_and(is_word)
        && tag.bytes().all(|b| is_word(b) || b == b'.' || b == b'-')
}

fn is_digest(digest: &str) -> bool {
    let Some((algorithm, hex)) = digest.split_once(':') else { return false };
    let is_part = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphabetic()) && part.bytes().all(|b| b.is_ascii_alphanumeric())
    };
    algorithm.split(['-', '_', '+', '.']).all(is_part)
        && hex.len() >= 32
        && hex.bytes().all(|b| b.is_ascii_hexdigit())
}

// Only the registered algorithms.
fn check_digest(digest: &str) -> Result<(), InvalidReference> {
    let (algorithm, hex) = digest.split_once(':').unwrap_or_default();
    let length = match algorithm {
        "sha256" => 64,
        "sha384" => 96,
        "sha512" => 128,
        _ => return Err(InvalidReference::DigestAlgorithm),
    };
    if hex.len() != length {
        return Err(InvalidReference::DigestLength);
    }
    if hex.bytes().any(|b| b.is_ascii_uppercase()) {
        return Err(InvalidReference::DigestFormat);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_has_a_repository_with_a_registry() {
        for (image, want) in [
            ("busybox", "docker.io/library/busybox"),
            ("busybox:1.36", "docker.io/library/busybox"),
            ("team/app@sha256:00", "docker.io/team/app"),
            ("index.docker.io/team/app", "docker.io/team/app"),
            ("docker.io/busybox", "docker.io/library/busybox"),
            ("localhost/app", "localhost/app"),
            ("h:5000/a/b:1", "h:5000/a/b"),
            ("h.example/a/b:1@sha256:00", "h.example/a/b"),
        ] {
            assert_eq!(repository(image), want, "{image}");
        }
        assert_eq!(registry("h:5000/a/b"), "h:5000");
        for (image, want) in [
            ("busybox", "docker.io/library/busybox:latest"),
            ("h:5000/a:1", "h:5000/a:1"),
            ("h:5000/a", "h:5000/a:latest"),
            ("team/a:1@sha256:00", "docker.io/team/a@sha256:00"),
        ] {
            assert_eq!(full_name(image), want);
        }
    }

    #[test]
    fn an_image_name_without_tag_and_digest_gets_the_tag_latest() {
        let digest = format!("sha256:{}", "0a".repeat(32));
        for (name, tagged) in [
            ("busybox", false),
            ("busybox:1", true),
            ("library/busybox", false),
            ("localhost/a", false),
            ("Registry/a/b", false),
            ("h:5000/a/b", false),
            ("h:5000/a/b:v1.0_x-Y", true),
            ("[fe80::1]:5000/a", false),
            ("[::1]/a", false),
            ("a.b/c_d/e__f/g---h/i.j", false),
            (&format!("a@{digest}"), true),
            (&format!("r.test/a:1@{digest}"), true),
            (&format!("r.test/{}", "a".repeat(248)), false),
        ] {
            let want = if tagged { name.to_owned() } else { format!("{name}:latest") };
            assert_eq!(with_tag(name), Ok(want));
        }
    }

    #[test]
    fn an_invalid_image_name_is_rejected_with_the_kubelets_message() {
        let hex = "0".repeat(64);
        for (name, why) in [
            ("", INVALID),
            ("a b", INVALID),
            ("http://x/y", INVALID),
            ("x/", INVALID),
            ("/x", INVALID),
            ("a//b", INVALID),
            ("-x", INVALID),
            ("x-", INVALID),
            ("a___b", INVALID),
            ("a..b", INVALID),
            ("a:b:c", INVALID),
            ("busybox:", INVALID),
            ("busybox:-1", INVALID),
            ("h:port/a", INVALID),
            ("-h.test/a", INVALID),
            ("[::1/a", INVALID),
            ("a@sha256:00", INVALID),
            ("a@", INVALID),
            ("a@b@c", INVALID),
            ("ü", INVALID),
            (&format!("busybox:{}", "1".repeat(129)), INVALID),
            (&format!("a@md5:{}", "0".repeat(32)), "unsupported digest algorithm"),
            (&format!("a@sha256:{}", "0".repeat(63)), "invalid checksum digest length"),
            (&format!("a@sha256:{}", "A".repeat(64)), "invalid checksum digest format"),
            ("Upper:1", "invalid reference format: repository name (library/Upper) must be lowercase"),
            ("r.test/Upper", "invalid reference format: repository name (Upper) must be lowercase"),
            (&hex, &format!("invalid repository name ({hex}), cannot specify 64-byte hexadecimal strings")),
            (&format!("r.test/{}", "a".repeat(249)), "repository name must not be more than 255 characters"),
        ] {
            let error = with_tag(name).unwrap_err().to_string();
            assert_eq!(error, format!("couldn't parse image name {name:?}: {why}"));
        }
    }
}
