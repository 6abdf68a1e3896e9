//! What spaCy's English tokenizer splits by table, written by `tests/tables.py` from spaCy 3.8.18 (MIT).

/// The special cases, two spaces apart; one space separates the tokens of a case. Cases of white space are left out:
/// they are one token with and without the rule.
pub(super) const SPECIAL_CASES: &str = r##"
'  ''  'Cause  'Cos  'Coz  'Cuz  'S  'bout  'cause  'cos  'coz  'cuz  'd  'em  'll  'nuff  're  's  (*_*)  (-8  (-:
(-;  (-_-)  (._.)  (:  (;  (=  (>_<)  (^_^)  (o:  (¬_¬)  (ಠ_ಠ)  (╯°□°）╯︵┻━┻  )-:  ):  -_-  -__-  ._.  0.0  0.o  0_0
0_o  10 a.m.  10 am  10 p.m.  10 pm  11 a.m.  11 am  11 p.m.  11 pm  12 a.m.  12 am  12 p.m.  12 pm  1 a.m.  1 am
1 p.m.  1 pm  2 a.m.  2 am  2 p.m.  2 pm  3 a.m.  3 am  3 p.m.  3 pm  4 a.m.  4 am  4 p.m.  4 pm  5 a.m.  5 am
5 p.m.  5 pm  6 a.m.  6 am  6 p.m.  6 pm  7 a.m.  7 am  7 p.m.  7 pm  8)  8-)  8-D  8D  8 a.m.  8 am  8 p.m.  8 pm
9 a.m.  9 am  9 p.m.  9 pm  :'(  :')  :'-(  :'-)  :(  :((  :(((  :()  :)  :))  :)))  :*  :-(  :-((  :-(((  :-)  :-))
:-)))  :-*  :-/  :-0  :-3  :->  :-D  :-O  :-P  :-X  :-]  :-o  :-p  :-x  :-|  :-}  :/  :0  :1  :3  :>  :D  :O  :P  :X
:]  :o  :o)  :p  :x  :|  :}  :’(  :’)  :’-(  :’-)  ;)  ;-)  ;-D  ;D  ;_;  <.<  </3  <3  <33  <333  <space>  =(  =)
=/  =3  =D  =[  =]  =|  >.<  >.>  >:(  >:o  ><(((*>  @_@  Adm.  Ai n't  Ai nt  Ai n’t  Ak.  Ala.  Apr.  Are n't
Are nt  Are n’t  Ariz.  Ark.  Aug.  Bros.  C'm on  C++  Calif.  Ca n't  Ca n't 've  Can not  Ca nt  Ca nt ve  Ca n’t
Ca n’t ’ve  Co.  Colo.  Conn.  Corp.  Could 've  Could n't  Could n't 've  Could nt  Could nt ve  Could n’t
Could n’t ’ve  Could ve  Could ’ve  C’m on  D.C.  Dare n't  Dare nt  Dare n’t  Dec.  Del.  Did n't  Did n't 've
Did nt  Did nt ve  Did n’t  Did n’t ’ve  Does n't  Does n't 've  Does nt  Does nt ve  Does n’t  Does n’t ’ve  Doin
Doin'  Doin’  Do n't  Do n't 've  Do nt  Do nt ve  Do n’t  Do n’t ’ve  Dr.  E.G.  E.g.  Feb.  Fla.  Ga.  Gen.  Goin
Goin'  Goin’  Gon na  Got ta  Gov.  Had n't  Had n't 've  Had nt  Had nt ve  Had n’t  Had n’t ’ve  Has n't  Has nt
Has n’t  Have n't  Have nt  Have n’t  Havin  Havin'  Havin’  He 'd  He 'd 've  He 'll  He 'll 've  He 's  He d
He d ve  He ll ve  He s  He ’d  He ’d ’ve  He ’ll  He ’ll ’ve  He ’s  How 'd  How 'd 've  How 'd 'y  How 'll
How 'll 've  How 're  How 's  How 've  How d  How d ve  How ll  How ll ve  How re  How s  How ve  How ’d  How ’d ’ve
How ’d ’y  How ’ll  How ’ll ’ve  How ’re  How ’s  How ’ve  I 'd  I 'd 've  I 'll  I 'll 've  I 'm  I 'm a  I 've
I.E.  I.e.  Ia.  I d  Id.  I d ve  Ill.  I ll ve  I m  I m a  Inc.  Ind.  Is n't  Is nt  Is n’t  It 'd  It 'd 've
It 'll  It 'll 've  It 's  It d  It d ve  It ll  It ll ve  It ’d  It ’d ’ve  It ’ll  It ’ll ’ve  It ’s  I ve  I ’d
I ’d ’ve  I ’ll  I ’ll ’ve  I ’m  I ’m a  I ’ve  Jan.  Jr.  Jul.  Jun.  Kan.  Kans.  Ky.  La.  Let 's  Let ’s  Lovin
Lovin'  Lovin’  Ltd.  Ma'am  Mar.  Mass.  May n't  May n't 've  May nt  May nt ve  May n’t  May n’t ’ve  Ma’am  Md.
Messrs.  Mich.  Might 've  Might n't  Might n't 've  Might nt  Might nt ve  Might n’t  Might n’t ’ve  Might ve
Might ’ve  Minn.  Miss.  Mo.  Mont.  Mr.  Mrs.  Ms.  Mt.  Must 've  Must n't  Must n't 've  Must nt  Must nt ve
Must n’t  Must n’t ’ve  Must ve  Must ’ve  N.C.  N.D.  N.H.  N.J.  N.M.  N.Y.  Neb.  Nebr.  Need n't  Need n't 've
Need nt  Need nt ve  Need n’t  Need n’t ’ve  Nev.  Not 've  Nothin  Nothin'  Nothin’  Not ve  Not ’ve  Nov.  Nuthin
Nuthin'  Nuthin’  O'clock  O.O  O.o  O_O  O_o  Oct.  Okla.  Ol  Ol'  Ol’  Ore.  Ought n't  Ought n't 've  Ought nt
Ought nt ve  Ought n’t  Ought n’t ’ve  O’clock  Pa.  Ph.D.  Prof.  Rep.  Rev.  S.C.  Sen.  Sep.  Sept.  Sha n't
Sha n't 've  Sha nt  Sha nt ve  Sha n’t  Sha n’t ’ve  She 'd  She 'd 've  She 'll  She 'll 've  She 's  She d ve
She ll ve  She s  She ’d  She ’d ’ve  She ’ll  She ’ll ’ve  She ’s  Should 've  Should n't  Should n't 've  Should nt
Should nt ve  Should n’t  Should n’t ’ve  Should ve  Should ’ve  Somethin  Somethin'  Somethin’  St.  Tenn.  That 'd
That 'd 've  That 'll  That 'll 've  That 's  That d  That d ve  That ll  That ll ve  That s  That ’d  That ’d ’ve
That ’ll  That ’ll ’ve  That ’s  There 'd  There 'd 've  There 'll  There 'll 've  There 're  There 's  There 've
There d  There d ve  There ll  There ll ve  There re  There s  There ve  There ’d  There ’d ’ve  There ’ll
There ’ll ’ve  There ’re  There ’s  There ’ve  These 'd  These 'd 've  These 'll  These 'll 've  These 're  These 've
These d  These d ve  These ll  These ll ve  These re  These ve  These ’d  These ’d ’ve  These ’ll  These ’ll ’ve
These ’re  These ’ve  They 'd  They 'd 've  They 'll  They 'll 've  They 're  They 've  They d  They d ve  They ll
They ll ve  They re  They ve  They ’d  They ’d ’ve  They ’ll  They ’ll ’ve  They ’re  They ’ve  This 'd  This 'd 've
This 'll  This 'll 've  This 's  This d  This d ve  This ll  This ll ve  This s  This ’d  This ’d ’ve  This ’ll
This ’ll ’ve  This ’s  Those 'd  Those 'd 've  Those 'll  Those 'll 've  Those 're  Those 've  Those d  Those d ve
Those ll  Those ll ve  Those re  Those ve  Those ’d  Those ’d ’ve  Those ’ll  Those ’ll ’ve  Those ’re  Those ’ve
V.V  V_V  Va.  Wash.  Was n't  Was nt  Was n’t  We 'd  We 'd 've  We 'll  We 'll 've  We 're  We 've  We d  We d ve
We ll ve  Were n't  Were nt  Were n’t  We ve  We ’d  We ’d ’ve  We ’ll  We ’ll ’ve  We ’re  We ’ve  What 'd
What 'd 've  What 'll  What 'll 've  What 're  What 's  What 've  What d  What d ve  What ll  What ll ve  What re
What s  What ve  What ’d  What ’d ’ve  What ’ll  What ’ll ’ve  What ’re  What ’s  What ’ve  When 'd  When 'd 've
When 'll  When 'll 've  When 're  When 's  When 've  When d  When d ve  When ll  When ll ve  When re  When s  When ve
When ’d  When ’d ’ve  When ’ll  When ’ll ’ve  When ’re  When ’s  When ’ve  Where 'd  Where 'd 've  Where 'll
Where 'll 've  Where 're  Where 's  Where 've  Where d  Where d ve  Where ll  Where ll ve  Where re  Where s
Where ve  Where ’d  Where ’d ’ve  Where ’ll  Where ’ll ’ve  Where ’re  Where ’s  Where ’ve  Who 'd  Who 'd 've
Who 'll  Who 'll 've  Who 're  Who 's  Who 've  Who d  Who d ve  Who ll  Who ll ve  Who s  Who ve  Who ’d  Who ’d ’ve
Who ’ll  Who ’ll ’ve  Who ’re  Who ’s  Who ’ve  Why 'd  Why 'd 've  Why 'll  Why 'll 've  Why 're  Why 's  Why 've
Why d  Why d ve  Why ll  Why ll ve  Why re  Why s  Why ve  Why ’d  Why ’d ’ve  Why ’ll  Why ’ll ’ve  Why ’re  Why ’s
Why ’ve  Wis.  Wo n't  Wo n't 've  Wo nt  Wo nt ve  Wo n’t  Wo n’t ’ve  Would 've  Would n't  Would n't 've  Would nt
Would nt ve  Would n’t  Would n’t ’ve  Would ve  Would ’ve  XD  XDD  You 'd  You 'd 've  You 'll  You 'll 've
You 're  You 've  You d  You d ve  You ll  You ll ve  You re  You ve  You ’d  You ’d ’ve  You ’ll  You ’ll ’ve
You ’re  You ’ve  [-:  [:  [=  \")  \n  \t  ]=  ^_^  ^__^  ^___^  a.  a.m.  ai n't  ai nt  ai n’t  and/or  are n't
are nt  are n’t  b.  c'm on  c.  ca n't  ca n't 've  can not  ca nt  ca nt ve  ca n’t  ca n’t ’ve  co.  could 've
could n't  could n't 've  could nt  could nt ve  could n’t  could n’t ’ve  could ve  could ’ve  c’m on  d.  dare n't
dare nt  dare n’t  did n't  did n't 've  did nt  did nt ve  did n’t  did n’t ’ve  does n't  does n't 've  does nt
does nt ve  does n’t  does n’t ’ve  doin  doin'  doin’  do n't  do n't 've  do nt  do nt ve  do n’t  do n’t ’ve  e.
e.g.  em  f.  g.  goin  goin'  goin’  gon na  got ta  h.  had n't  had n't 've  had nt  had nt ve  had n’t
had n’t ’ve  has n't  has nt  has n’t  have n't  have nt  have n’t  havin  havin'  havin’  he 'd  he 'd 've  he 'll
he 'll 've  he 's  he d  he d ve  he ll ve  he s  he ’d  he ’d ’ve  he ’ll  he ’ll ’ve  he ’s  how 'd  how 'd 've
how 'd 'y  how 'll  how 'll 've  how 're  how 's  how 've  how d  how d ve  how ll  how ll ve  how re  how s  how ve
how ’d  how ’d ’ve  how ’d ’y  how ’ll  how ’ll ’ve  how ’re  how ’s  how ’ve  i 'd  i 'd 've  i 'll  i 'll 've  i 'm
i 'm a  i 've  i.  i.e.  i d  i d ve  i ll ve  i m  i m a  is n't  is nt  is n’t  it 'd  it 'd 've  it 'll
it 'll 've  it 's  it d  it d ve  it ll  it ll ve  it ’d  it ’d ’ve  it ’ll  it ’ll ’ve  it ’s  i ve  i ’d  i ’d ’ve
i ’ll  i ’ll ’ve  i ’m  i ’m a  i ’ve  j.  k.  l.  let 's  let ’s  ll  lovin  lovin'  lovin’  m.  ma'am  may n't
may n't 've  may nt  may nt ve  may n’t  may n’t ’ve  ma’am  might 've  might n't  might n't 've  might nt
might nt ve  might n’t  might n’t ’ve  might ve  might ’ve  must 've  must n't  must n't 've  must nt  must nt ve
must n’t  must n’t ’ve  must ve  must ’ve  n.  need n't  need n't 've  need nt  need nt ve  need n’t  need n’t ’ve
not 've  nothin  nothin'  nothin’  not ve  not ’ve  nuff  nuthin  nuthin'  nuthin’  o'clock  o.  o.0  o.O  o.o  o_0
o_O  o_o  ol  ol'  ol’  ought n't  ought n't 've  ought nt  ought nt ve  ought n’t  ought n’t ’ve  o’clock  p.  p.m.
q.  r.  s.  sha n't  sha n't 've  sha nt  sha nt ve  sha n’t  sha n’t ’ve  she 'd  she 'd 've  she 'll  she 'll 've
she 's  she d ve  she ll ve  she s  she ’d  she ’d ’ve  she ’ll  she ’ll ’ve  she ’s  should 've  should n't
should n't 've  should nt  should nt ve  should n’t  should n’t ’ve  should ve  should ’ve  somethin  somethin'
somethin’  t.  that 'd  that 'd 've  that 'll  that 'll 've  that 's  that d  that d ve  that ll  that ll ve  that s
that ’d  that ’d ’ve  that ’ll  that ’ll ’ve  that ’s  there 'd  there 'd 've  there 'll  there 'll 've  there 're
there 's  there 've  there d  there d ve  there ll  there ll ve  there re  there s  there ve  there ’d  there ’d ’ve
there ’ll  there ’ll ’ve  there ’re  there ’s  there ’ve  these 'd  these 'd 've  these 'll  these 'll 've  these 're
these 've  these d  these d ve  these ll  these ll ve  these re  these ve  these ’d  these ’d ’ve  these ’ll
these ’ll ’ve  these ’re  these ’ve  they 'd  they 'd 've  they 'll  they 'll 've  they 're  they 've  they d
they d ve  they ll  they ll ve  they re  they ve  they ’d  they ’d ’ve  they ’ll  they ’ll ’ve  they ’re  they ’ve
this 'd  this 'd 've  this 'll  this 'll 've  this 's  this d  this d ve  this ll  this ll ve  this s  this ’d
this ’d ’ve  this ’ll  this ’ll ’ve  this ’s  those 'd  those 'd 've  those 'll  those 'll 've  those 're  those 've
those d  those d ve  those ll  those ll ve  those re  those ve  those ’d  those ’d ’ve  those ’ll  those ’ll ’ve
those ’re  those ’ve  u.  v.  v.s.  v.v  v_v  vs.  w.  w/o  was n't  was nt  was n’t  we 'd  we 'd 've  we 'll
we 'll 've  we 're  we 've  we d  we d ve  we ll ve  were n't  were nt  were n’t  we ve  we ’d  we ’d ’ve  we ’ll
we ’ll ’ve  we ’re  we ’ve  what 'd  what 'd 've  what 'll  what 'll 've  what 're  what 's  what 've  what d
what d ve  what ll  what ll ve  what re  what s  what ve  what ’d  what ’d ’ve  what ’ll  what ’ll ’ve  what ’re
what ’s  what ’ve  when 'd  when 'd 've  when 'll  when 'll 've  when 're  when 's  when 've  when d  when d ve
when ll  when ll ve  when re  when s  when ve  when ’d  when ’d ’ve  when ’ll  when ’ll ’ve  when ’re  when ’s
when ’ve  where 'd  where 'd 've  where 'll  where 'll 've  where 're  where 's  where 've  where d  where d ve
where ll  where ll ve  where re  where s  where ve  where ’d  where ’d ’ve  where ’ll  where ’ll ’ve  where ’re
where ’s  where ’ve  who 'd  who 'd 've  who 'll  who 'll 've  who 're  who 's  who 've  who d  who d ve  who ll
who ll ve  who s  who ve  who ’d  who ’d ’ve  who ’ll  who ’ll ’ve  who ’re  who ’s  who ’ve  why 'd  why 'd 've
why 'll  why 'll 've  why 're  why 's  why 've  why d  why d ve  why ll  why ll ve  why re  why s  why ve  why ’d
why ’d ’ve  why ’ll  why ’ll ’ve  why ’re  why ’s  why ’ve  wo n't  wo n't 've  wo nt  wo nt ve  wo n’t  wo n’t ’ve
would 've  would n't  would n't 've  would nt  would nt ve  would n’t  would n’t ’ve  would ve  would ’ve  x.  xD
xDD  y' all  y.  y all  you 'd  you 'd 've  you 'll  you 'll 've  you 're  you 've  you d  you d ve  you ll
you ll ve  you re  you ve  you ’d  you ’d ’ve  you ’ll  you ’ll ’ve  you ’re  you ’ve  y’ all  z.  ¯\(ツ)/¯  ° C .
° F .  ° K .  ° c .  ° f .  ° k .  ä.  ö.  ü.  ಠ_ಠ  ಠ︵ಠ  —  ‘S  ‘s  ’  ’Cause  ’Cos  ’Coz  ’Cuz  ’S  ’bout  ’cause
’cos  ’coz  ’cuz  ’d  ’em  ’ll  ’nuff  ’re  ’s  ’’
"##;

/// Units, currencies and the sign that are a suffix directly after an ASCII digit.
pub(super) const SUFFIXES_AFTER_DIGIT: &str = "\
    $ % + A$ C$ G GB K KB M MB Pa T TB US$ cm cm² cm³ dm dm² dm³ ft g gb hPa ha in kb kg km km/h kmh km² km³ lb m m/s \
    mb mbar mg mm mm² mm³ mph m² m³ nm oz t tb yd £ ¥ µg µm ГБ Гб КБ Кб МБ Мб Па ТБ Тб г гб дм дм² дм³ кПа кб кг км \
    км/ч км² км³ м м/с м² м³ мб мбар мг мм мм² мм³ нм см см² см³ тбكم اكواب جرام جم سم سم² سم³ غرام كغ كم كم² كم³ كوب \
    م م² م³ ملغ مم مم² مم³ ฿ ₠ ₡ ₢ ₣ ₤ ₥ ₦ ₧ ₨ ₩ ₪ ₫ € ₭ ₮ ₯ ₰ ₱ ₲ ₳ ₴ ₵ ₶ ₷ ₸ ₹ ₺ ₻ ₼ ₽ ₾ ₿ ﷼ \
    ";
