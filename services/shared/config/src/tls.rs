//! Names of cipher suites and numbers of groups: which Go's TLS has, and which this server can speak. It has none that is
//! unsafe, and all suites of TLS 1.3 are always there.

/// What becomes of a name or number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Support {
    /// It is spoken; its name in the registry of IANA.
    Spoken(&'static str),
    /// Go has it and this server has not: it is left out.
    LeftOut(&'static str),
    /// Suites of TLS 1.3 cannot be chosen, neither here nor in Go: naming one changes nothing.
    Always,
    /// Nobody has it.
    Unknown,
}

const UNSAFE: &str = "not spoken, as it is unsafe";

/// The suites of TLS 1.2 that are spoken.
pub const SUITES: [&str; 6] = [
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
];

/// What becomes of a cipher suite.
#[must_use]
pub fn suite(name: &str) -> Support {
    if let Some(spoken) = SUITES.iter().find(|s| **s == name) {
        return Support::Spoken(spoken);
    }
    match name {
        // Names from before the registry had these.
        "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305" => Support::Spoken(SUITES[2]),
        "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305" => Support::Spoken(SUITES[5]),
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
        | "TLS_RSA_WITH_RC4_128_SHA" => Support::LeftOut(UNSAFE),
        _ => Support::Unknown,
    }
}

/// What becomes of a group, by its number in the registry of IANA.
#[must_use]
pub fn group(number: u16) -> Support {
    match number {
        23 => Support::Spoken("secp256r1"),
        24 => Support::Spoken("secp384r1"),
        29 => Support::Spoken("X25519"),
        25 => Support::LeftOut("secp521r1 is not spoken"),
        4587 => Support::LeftOut("SecP256r1MLKEM768 is not spoken"),
        4588 => Support::LeftOut("X25519MLKEM768 is not spoken"),
        4589 => Support::LeftOut("SecP384r1MLKEM1024 is not spoken"),
        _ => Support::Unknown,
    }
}
