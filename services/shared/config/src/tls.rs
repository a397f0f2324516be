//! Cipher suites and key exchange groups of Go's `crypto/tls`, and which of them this server supports. It
//! supports no insecure suites, and always offers all suites of TLS 1.3.

/// Whether this server supports a cipher suite or a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Support {
    /// Supported. Holds its name in the IANA registry.
    Supported(&'static str),
    /// Go supports it but this server does not, so it is skipped. Holds the reason.
    Unsupported(&'static str),
    /// A suite of TLS 1.3, which is always offered, as in Go.
    Always,
    /// Neither Go nor this server supports it.
    Unknown,
}

const UNSAFE: &str = "not supported, it is insecure";

/// The supported cipher suites of TLS 1.2.
pub const SUITES: [&str; 6] = [
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
];

/// Returns whether a cipher suite is supported.
#[must_use]
pub fn suite(name: &str) -> Support {
    if let Some(supported) = SUITES.iter().find(|s| **s == name) {
        return Support::Supported(supported);
    }
    match name {
        // Go's names for these suites from before their registration.
        "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305" => Support::Supported(SUITES[2]),
        "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305" => Support::Supported(SUITES[5]),
        "TLS_AES_128_GCM_SHA256" | "TLS_AES_256_GCM_SHA384" | "TLS_CHACHA20_POLY1305_SHA256" => {
            Support::Always
        }
        "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA"
        | "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA"
        | "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA"
        | "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA"
        | "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256"
        | "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256"
        | "TLS_ECDHE_RSA_WITH_3DES_EDE_CBC_SHA"
        | "TLS_ECDHE_ECDSA_WITH_RC4_128_SHA"
        | "TLS_ECDHE_RSA_WITH_RC4_128_SHA"
        | "TLS_RSA_WITH_AES_128_GCM_SHA256"
        | "TLS_RSA_WITH_AES_256_GCM_SHA384"
        | "TLS_RSA_WITH_AES_128_CBC_SHA"
        | "TLS_RSA_WITH_AES_256_CBC_SHA"
        | "TLS_RSA_WITH_AES_128_CBC_SHA256"
        | "TLS_RSA_WITH_3DES_EDE_CBC_SHA"
        | "TLS_RSA_WITH_RC4_128_SHA" => Support::Unsupported(UNSAFE),
        _ => Support::Unknown,
    }
}

/// Returns whether a group is supported, by its number in the IANA registry.
#[must_use]
pub fn group(number: u16) -> Support {
    match number {
        23 => Support::Supported("secp256r1"),
        24 => Support::Supported("secp384r1"),
        29 => Support::Supported("X25519"),
        25 => Support::Unsupported("secp521r1 is not supported"),
        4587 => Support::Unsupported("SecP256r1MLKEM768 is not supported"),
        4588 => Support::Unsupported("X25519MLKEM768 is not supported"),
        4589 => Support::Unsupported("SecP384r1MLKEM1024 is not supported"),
        _ => Support::Unknown,
    }
}
