//! Schemes of the URLs of HTTP probes and hooks, checked as Go's `net/url` and `net/http` do.

/// Scheme of an HTTP probe or hook (`HTTPGetAction.scheme`). The API server accepts only HTTP and HTTPS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UrlScheme {
    /// HTTP, also if the field is not set.
    Http,
    /// HTTPS, without verification of the certificate.
    Https,
    /// Any other word, in lower case. A request fails before a connection is made.
    Unsupported(String),
}

impl UrlScheme {
    /// Returns the scheme of a field (`pkg/probe/http: NewRequestForHTTPGetAction`).
    #[must_use]
    pub fn parse(field: &str) -> Self {
        match field.to_lowercase().as_str() {
            "" | "http" => Self::Http,
            "https" => Self::Https,
            other => Self::Unsupported(other.to_owned()),
        }
    }
}

/// A URL has an unsupported scheme. The texts are those of the kubelet.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SchemeError {
    /// The URL cannot be parsed: there is no request.
    #[error("parse {url:?}: {reason}")]
    Url {
        /// The whole URL.
        url: String,
        /// The error of `net/url`.
        reason: &'static str,
    },
    /// The request cannot be sent.
    #[error("Get \"{url}\": unsupported protocol scheme \"{scheme}\"")]
    Protocol {
        /// The whole URL.
        url: String,
        /// The scheme in lower case.
        scheme: String,
    },
}

impl SchemeError {
    /// Returns the error of a request for `scheme://rest`.
    #[must_use]
    pub fn new(scheme: &str, rest: &str) -> Self {
        let url = format!("{scheme}://{rest}");
        let is_letter = |c: char| c.is_ascii_alphabetic();
        let is_valid = scheme.starts_with(is_letter)
            && scheme.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.'));
        if is_valid {
            return Self::Protocol { url, scheme: scheme.to_owned() };
        }
        let before_colon = scheme.split(':').next().unwrap_or_default();
        let reason = if scheme.chars().any(|c| c.is_ascii_control()) {
            "net/url: invalid control character in URL"
        } else if before_colon.is_empty() {
            "missing protocol scheme"
        } else {
            "first path segment in URL cannot contain colon"
        };
        Self::Url { url, reason }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scheme_is_http_https_or_unsupported() {
        for (field, scheme) in [
            ("", UrlScheme::Http),
            ("HTTP", UrlScheme::Http),
            ("http", UrlScheme::Http),
            ("HTTPS", UrlScheme::Https),
            ("hTTps", UrlScheme::Https),
            ("FTP", UrlScheme::Unsupported("ftp".to_owned())),
            (" HTTP", UrlScheme::Unsupported(" http".to_owned())),
        ] {
            assert_eq!(UrlScheme::parse(field), scheme, "{field:?}");
        }
    }

    #[test]
    fn errors_of_unsupported_schemes_have_the_words_of_go() {
        for (scheme, error) in [
            ("sideways", "Get \"sideways://h:1/x\": unsupported protocol scheme \"sideways\""),
            ("a+b-c.1", "Get \"a+b-c.1://h:1/x\": unsupported protocol scheme \"a+b-c.1\""),
            ("two words", "parse \"two words://h:1/x\": first path segment in URL cannot contain colon"),
            ("1st", "parse \"1st://h:1/x\": first path segment in URL cannot contain colon"),
            (":", "parse \":://h:1/x\": missing protocol scheme"),
            ("a\nb", "parse \"a\\nb://h:1/x\": net/url: invalid control character in URL"),
        ] {
            assert_eq!(SchemeError::new(scheme, "h:1/x").to_string(), error);
        }
    }
}
