"""Identity: SSH certificate authorities, enrolment of hosts, tokens of an OpenID provider."""
