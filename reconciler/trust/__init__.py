"""Who is who over SSH: our certificate authorities, host certificates, enrolment of hosts."""
